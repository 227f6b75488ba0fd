"""`python -m llmconv`."""

from llmconv.cli import main

if __name__ == "__main__":
    main()
