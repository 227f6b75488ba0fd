if __name__ != "llmconv.export":
    raise ImportError("import llmconv.export: `export` is no top-level package")
