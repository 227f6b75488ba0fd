"""Make the environments of the clients that the slow tests open graphs in; quick where they are there already."""

from __future__ import annotations

from benchmarks import environments


def main() -> None:
    """All of them, in `build/`."""
    for make, name in (
        (environments.python, "genai"),
        (environments.python, "optimum"),
        (environments.node, "transformersjs"),
    ):
        print(f"{name}: {make(name)}")


if __name__ == "__main__":
    main()
