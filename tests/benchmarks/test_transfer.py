"""The benchmark of transfer: its folds and its table."""

import json

import transfer


def test_folds_are_every_other_picture_and_people_alone(tmp_path):
    coco = {
        "images": [{"id": number} for number in (5, 2, 9, 4)],
        "categories": [{"id": 3, "name": "car"}, {"id": 1, "name": "person"}],
        "annotations": [{"id": n, "image_id": image, "category_id": category}
                        for n, (image, category) in enumerate([(2, 1), (2, 3), (4, 1), (5, 1), (9, 3)])],
    }
    folds = [json.loads(file.read_text()) for file in transfer.write_folds(coco, tmp_path)]
    assert [[image["id"] for image in fold["images"]] for fold in folds] == [[2, 5], [4, 9]]
    assert [[a["id"] for a in fold["annotations"]] for fold in folds] == [[0, 3], [2]]
    assert all(fold["categories"] == [{"id": 1, "name": "person"}] for fold in folds)


def test_the_table_names_both_folds():
    folds = [{"box_ap": 1.0, "box_ap50": 3.0, "hours": 0.25}, {"box_ap": 2.0, "box_ap50": 5.0, "hours": 0.2}]
    found = {"detectors": [{"encoder": "B", "mode": "frozen", "folds": folds}]}
    assert transfer.cells(found)[1] == ["B", "frozen", "1.5 (1.0, 2.0)", "4.0 (3.0, 5.0)", "0.5"]
