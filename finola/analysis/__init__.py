"""Looking inside a model: the space of its vectors q and the surfaces of its maps z.

    statistics    mean, covariance and principal components of any number of vectors, in one pass
    embedding     what the decoder paints for the mean vector and along lines, samples and components
    curvature     Gaussian curvature of the feature surfaces
    growth        the map and the image as the law walks away from q
    equations     how far the law's two equations hold, and finer grids (`finola.pde`)
"""
