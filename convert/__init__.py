if __name__ != "llmconv.convert":
    raise ImportError("import llmconv.convert: `convert` is no top-level package")
