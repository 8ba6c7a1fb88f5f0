"""The page of `finola playground`: what stands where, and which control leads to which action.

It imports no torch: the page is there before the model is, and its first action waits for it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

from finola.data.examples import example_paths
from finola.errors import FinolaError, RecipeError

if TYPE_CHECKING:
    import gradio as gr

    from finola.cli.playground.actions import Photograph, Playground

FACTORS = (2, 3, 4)  # of finer grids; finola.cli.playground.actions.LARGEST is the largest
SLIDERS = 6  # of principal components; finola.analysis.statistics.KEPT stand in a file
FIRST, SECOND = "parrots", "lighthouse"  # what the page begins with
PATIENCE, PATIENCE_AT_END = 120, 5  # seconds for the model to be there, and for the last action
LARGEST_FILE = "100mb"
SESSIONS = 32  # open pages whose photographs are kept

FONTS = ["system-ui", "sans-serif"]
POLICY = b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:"  # nothing from elsewhere
CSS = """
.gradio-container {max-width: 1240px !important}
footer {display: none !important}
/* labels and buttons stand above an image, not on it, and the image is as wide as its place */
.figure > label.float {position: static; width: 100%; border: none; background: none}
.figure > label > span {display: none}
.figure .icon-button-wrapper {top: -27px; border: none; background: none}
.figure .image-container > button, .figure .image-frame {width: 100%}
.figure .image-frame img {width: 100%; height: auto; object-fit: contain}
.square .image-frame {aspect-ratio: 1}
.animation {max-width: 640px; margin-left: 0 !important}
.drop [data-testid=upload-text] {font-size: 0}
.drop [data-testid=upload-text]::after {content: "drop one here, or click to choose"; font-size: var(--text-md)}
.drop .icon-wrap {display: none}
.shelf .gallery {display: flex; gap: 8px}
.shelf .gallery-item {flex: 1; min-width: 0}
.shelf .container, .shelf img {width: 100% !important; height: auto !important; max-width: none !important}
.words table, .words tr, .words td {border: none !important}
.words thead {display: none}
.fault .prose * {color: #e5484d !important}
"""

INTRODUCTION = """# finola playground
A photograph becomes one vector *q*. One linear law grows a feature map out of *q*, and a decoder paints the map: all
that you see was painted from *q* alone."""
REBUILD = "The encoder makes *q* of the square on the left. The image on the right is painted from *q*."
SLIDE = "Every vector on the way from one photograph's to another's can be painted: (1 − t) · q₁ + t · q₂."
COMPONENTS = """The first slider leads from *q* to the mean m of all vectors, which is nearly gray, and as far again to
the mirror 2m − q, which has the colours reversed. The others move *q* by so many standard deviations in the directions
in which the vectors of photographs differ most."""
GROW = """*q* is placed in an empty map. Each step of the law, z + A·n(z), leads from a position to its neighbour, with
one matrix A for each of the four directions, the same everywhere and for all photographs. A position is the mean of two
ways to it: along the row first, and along the column first."""
QUANTISE = """Each number of *q* is rounded to one of 2ᵇ values, as in the paper. Entropy coding then writes the likely
ones with fewer bits. The file is what `finola compress` writes and `finola decompress` reads."""
FINER = """Read as a differential equation, the law can be asked for a finer map, or for the same map moved by parts of
a pixel. The model has learned whole steps alone: here you see how far the equation carries beyond them."""


class Page:
    """The page, to be launched first and given a model to play with afterwards."""

    def __init__(self) -> None:
        self.ready: Future[Playground] = Future()
        self.asked = Event()  # for the first time, by a browser that has loaded the page
        self.busy = Lock()
        self.blocks = self._build()

    def launch(self, host: str, port: int, browser: bool) -> None:
        """Serve the page.

        Raises:
            RecipeError: the port was taken meanwhile.
        """
        import gradio as gr
        from starlette.middleware import Middleware

        theme = gr.themes.Default(primary_hue="teal", font=FONTS, font_mono=["monospace"])
        try:
            self.blocks.launch(
                server_name=host, server_port=port, inbrowser=browser, share=False, quiet=True,
                prevent_thread_lock=True, theme=theme, css=CSS, footer_links=[], run_history=False,
                enable_monitoring=False, ssr_mode=False, mcp_server=False, pwa=False, max_file_size=LARGEST_FILE,
                state_session_capacity=SESSIONS, app_kwargs={"middleware": [Middleware(NothingFromElsewhere)]})
        except OSError as error:
            raise RecipeError(f"--port: {port} on {host} cannot be used; choose another") from error
        print(f"finola playground: http://{host}:{port}   (Ctrl-C ends it)", flush=True)

    def play(self, playground: Playground) -> None:
        """From now on the page answers."""
        self.ready.set_result(playground)

    def close(self) -> None:
        """Let the action under way come to its end, and answer nothing more."""
        self.ready.cancel()
        self.busy.acquire(timeout=PATIENCE_AT_END)
        logging.getLogger("uvicorn.error").disabled = True  # requests that still come find no files
        self.blocks.server.should_exit = True

    def _build(self) -> gr.Blocks:
        import gradio as gr

        blocks = gr.Blocks(title="finola playground", analytics_enabled=False)
        with blocks:
            gr.Markdown(INTRODUCTION)
            self.shown = gr.State("Rebuild")  # the title of the tab
            with gr.Row():
                with gr.Column(scale=1, min_width=260):
                    photo = self._photograph(blocks, "Photograph", FIRST)
                with gr.Column(scale=3, min_width=320), gr.Tabs():
                    for title, build in (("Rebuild", self._rebuild), ("Slide", self._slide),
                                         ("Components", self._components), ("Grow", self._grow),
                                         ("Quantise", self._quantise), ("Finer grid", self._finer)):
                        with gr.Tab(title) as tab:
                            build(blocks, tab, photo)
        return blocks

    def _photograph(self, blocks: gr.Blocks, label: str, name: str) -> gr.State:
        """Where a photograph is dropped, or one of those that come along is chosen; at first that called `name`."""
        import gradio as gr

        paths = list(example_paths().values())
        gr.set_static_paths(paths)  # served from where they are
        photo = gr.State()
        upload = gr.File(label=label, height=120, elem_classes="drop")
        shelf = gr.Dataset(components=["image"], samples=[[str(path)] for path in paths], type="index",
                           show_label=False, elem_classes="shelf")
        words = _words("The model is being opened ...")

        def opened(playground: Playground, path: str | Path) -> tuple:
            try:
                found = playground.open(path)
            except FinolaError as error:
                return gr.skip(), None, _fault(error)
            return found, None, plain(found.words)  # an empty upload takes the next one

        self._on([upload.upload], opened, [upload], [photo, upload, words])
        self._on([shelf.click], lambda playground, number: opened(playground, paths[number]), [shelf],
                 [photo, upload, words])
        self._on([blocks.load], lambda playground: opened(playground, example_paths()[name]), [],
                 [photo, upload, words])
        return photo

    def _rebuild(self, blocks: gr.Blocks, tab: gr.Tab, photo: gr.State) -> None:
        import gradio as gr

        gr.Markdown(REBUILD)
        with gr.Row():
            original, painted = _figure("the photograph"), _figure("painted from q")
        words = _words()

        def rebuild(playground: Playground, photo: Photograph) -> tuple:
            shown = playground.rebuild(photo)
            return playground.keep(photo.square, "square"), playground.keep(shown.image, "rebuilt"), shown.words

        self._lead(tab, photo, [], rebuild, [original, painted, words])

    def _slide(self, blocks: gr.Blocks, tab: gr.Tab, first: gr.State) -> None:
        import gradio as gr

        gr.Markdown(SLIDE)
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                share = gr.Slider(0, 1, 0.5, step=0.01, label="from the first (0) to the second (1)")
                painted, words = _figure("painted between the two"), _words()
            with gr.Column(scale=1, min_width=140):
                one = _figure("first")
            with gr.Column(scale=1, min_width=140):
                other = _figure("second")
                second = self._photograph(blocks, "Second photograph", SECOND)

        def slide(playground: Playground, first: Photograph, share: float, second: Photograph) -> tuple:
            shown = playground.slide(first, second, share)
            ends = playground.keep(first.square, "first"), playground.keep(second.square, "second")
            return *ends, playground.keep(shown.image, "between"), shown.words

        self._lead(tab, first, [share, second], slide, [one, other, painted, words])

    def _components(self, blocks: gr.Blocks, tab: gr.Tab, photo: gr.State) -> None:
        import gradio as gr

        gr.Markdown(COMPONENTS)
        with gr.Row():
            with gr.Column(scale=1, min_width=300):
                painted, words = _figure("painted from the moved vector"), _words()
            with gr.Column(scale=1, min_width=260):
                line = gr.Slider(-1, 1, 1, step=0.05, label="q (1), mean (0), mirror (-1)")
                steps = [gr.Slider(-3, 3, 0, step=0.1, label=f"component {i + 1}") for i in range(SLIDERS)]
                back = gr.Button("Back to the photograph", size="sm")

        def move(playground: Playground, photo: Photograph, line: float, *steps: float) -> tuple:
            shown = playground.move(photo, line, steps)
            return playground.keep(shown.image, "moved"), shown.words

        def unmoved(playground: Playground, photo: Photograph) -> tuple:
            values = (1, *[0] * SLIDERS)
            return *values, *move(playground, photo, *values)

        self._lead(tab, photo, [line, *steps], move, [painted, words])
        self._on([back.click], unmoved, [photo], [line, *steps, painted, words])

    def _grow(self, blocks: gr.Blocks, tab: gr.Tab, photo: gr.State) -> None:
        import gradio as gr

        gr.Markdown(GROW)
        animation, words = _figure("the law at work", "figure animation", "gif"), _words()

        def grow(playground: Playground, photo: Photograph) -> tuple:
            path, line = playground.grow(photo)
            return str(path), line

        self._lead(tab, photo, [], grow, [animation, words])

    def _quantise(self, blocks: gr.Blocks, tab: gr.Tab, photo: gr.State) -> None:
        import gradio as gr

        gr.Markdown(QUANTISE)
        with gr.Row():
            with gr.Column(scale=1, min_width=300):
                painted = _figure("painted from the quantised vector")
            with gr.Column(scale=1, min_width=260):
                bits = gr.Slider(1, 8, 4, step=1, label="bits for each number of q")
                entropy = gr.Checkbox(True, label="entropy coding")
                words = _words()
                download = gr.DownloadButton("Download the .fnl file", size="sm")

        def quantise(playground: Playground, photo: Photograph, bits: float, entropy: bool) -> tuple:
            shown, path = playground.quantise(photo, int(bits), entropy)
            return playground.keep(shown.image, "quantised"), str(path), shown.words

        self._lead(tab, photo, [bits, entropy], quantise, [painted, download, words])

    def _finer(self, blocks: gr.Blocks, tab: gr.Tab, photo: gr.State) -> None:
        import gradio as gr

        gr.Markdown(FINER)
        with gr.Row():
            factor = gr.Radio([(f"{factor}×", factor) for factor in FACTORS], value=2, show_label=False)
            grid = gr.Radio([("map moved by parts of a pixel", "pixels"), ("finer map", "map")], value="pixels",
                            show_label=False)
        with gr.Row():
            figures = [_figure(label) for label in ("by the law", "enlarged", "the photograph")]
        words = _words()

        def finer(playground: Playground, photo: Photograph, factor: int, grid: str) -> tuple:
            *images, line = playground.finer(photo, factor, grid)
            names = (f"by_the_law_x{factor}", f"enlarged_x{factor}", f"photograph_x{factor}")
            return *(playground.keep(image, name) for image, name in zip(images, names, strict=True)), line

        self._lead(tab, photo, [factor, grid], finer, [*figures, words])

    def _lead(self, tab: gr.Tab, photo: gr.State, controls: list[Any], action: Callable, outputs: list[Any]) -> None:
        """A tab's action, of a photograph and the values of controls: run when the tab is opened or a control is moved,
        and when the photograph changes while the tab is shown."""
        import gradio as gr

        def if_shown(playground: Playground, title: str, *values: Any) -> tuple:
            return action(playground, *values) if title == tab.label else (*[gr.skip()] * len(outputs),)

        moved = [control.change if isinstance(control, gr.State) else control.input for control in controls]
        tab.select(lambda: tab.label, None, self.shown, show_progress="hidden", api_visibility="private")
        self._on([tab.select, *moved], action, [photo, *controls], outputs)
        self._on([photo.change], if_shown, [self.shown, photo, *controls], outputs)

    def _on(self, triggers: Sequence[Any], action: Callable, inputs: list[Any], outputs: list[Any]) -> None:
        """Lead events to an action, one at a time over all pages; of those that come meanwhile the last is kept."""
        import gradio as gr

        gr.on(triggers, self._guarded(action, len(outputs)), inputs or None, outputs, show_progress="hidden",
              trigger_mode="always_last", concurrency_limit=1, concurrency_id="model", api_visibility="private")

    def _guarded(self, action: Callable, outputs: int) -> Callable:
        """The action with the model before its arguments; its last result is a line of words. Nothing happens while
        there is no photograph. A fault becomes the line, and everything else stays as it is."""
        import gradio as gr

        def call(*values: Any) -> Any:
            if any(value is None for value in values):
                return [gr.skip()] * outputs
            self.asked.set()
            try:
                playground = self.ready.result(PATIENCE)
                with self.busy:
                    *shown, line = action(playground, *values)
            except FinolaError as error:
                shown, line = [gr.skip()] * (outputs - 1), _fault(error)
            except CancelledError:  # the page is at its end
                shown, line = [gr.skip()] * (outputs - 1), gr.skip()
            return *shown, line if isinstance(line, dict) else gr.update(value=line, elem_classes="words")

        return call


def plain(text: str) -> str:
    """Text that Markdown shows as it stands."""
    return re.sub(r"([\\`*_{}\[\]()<>#+!|$~&-])", r"\\\1", text)


def _figure(label: str, classes: str = "figure square", format: str = "png") -> gr.Image:
    import gradio as gr

    return gr.Image(label=label, interactive=False, type="filepath", format=format, elem_classes=classes,
                    buttons=["download", "fullscreen"], alt_text=label)


def _fault(error: FinolaError) -> dict[str, Any]:
    """What changes a line of words into that of an error."""
    import gradio as gr

    change: dict[str, Any] = gr.update(value=plain(str(error)), elem_classes="words fault")
    return change


def _words(text: str = "") -> gr.Markdown:
    import gradio as gr

    return gr.Markdown(text, elem_classes="words")


class NothingFromElsewhere:
    """Tells the browser to load nothing but what this server sends."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"content-security-policy", POLICY)]
            await send(message)

        await self.app(scope, receive, send_with_policy if scope["type"] == "http" else send)
