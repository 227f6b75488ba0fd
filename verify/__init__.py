if __name__ != "llmconv.verify":
    raise ImportError("import llmconv.verify: `verify` is no top-level package")
