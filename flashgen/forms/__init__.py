"""Forms: further functions of a module beside `attention`, for other layouts of the same call."""
