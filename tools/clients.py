"""Make the client environments for the slow tests; existing ones are kept."""

from __future__ import annotations

from benchmarks import environments


def main() -> None:
    """Makes all environments in `build/`."""
    for make, name in (
        (environments.python, "genai"),
        (environments.python, "optimum"),
        (environments.python, "embedders"),
        (environments.python, "lm-eval"),
        (environments.python, "openvino"),
        (environments.node, "transformersjs"),
        (environments.node, "azurite"),
        (environments.node, "chromium"),
        (environments.python, "chromedriver"),
        (environments.python, "smollm2"),
    ):
        print(f"{name}: {make(name)}")


if __name__ == "__main__":
    main()
