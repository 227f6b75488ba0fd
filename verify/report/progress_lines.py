"""ScenarioLines: the lines printed during a comparison, one for each scenario that passes."""

from __future__ import annotations

from collections.abc import Sequence

from llmconv.tensors import lists_by_key
from llmconv.verify.results import WORDS, Check, clean, lines_of
from llmconv.verify.sigma import sigma_text


class ScenarioLines:
    """Collects the checks of a scenario until the next one starts."""

    def __init__(self) -> None:
        self._checks: list[Check] = []
        self._graphs: set[str] = set()

    def add(self, checks: Sequence[Check]) -> list[str]:
        """Adds checks and returns the lines of finished scenarios."""
        lines = []
        for check in checks:
            if self._checks and self._checks[0].name != check.name:
                lines += self.close()
            self._checks.append(check)
            self._graphs |= {check.graph} - {""}
        return lines

    def close(self) -> list[str]:
        lines, self._checks = lines_of_scenario(self._checks, several_graphs=len(self._graphs) > 1), []
        return lines


def lines_of_scenario(checks: Sequence[Check], *, several_graphs: bool = False) -> list[str]:
    """One line, and one for every group of failed outputs and every reason of skipped checks of a scenario."""
    if not checks:
        return []
    failed, skipped = ([check for check in checks if check.verdict == verdict] for verdict in ("fail", "skip"))
    compared = [check for check in checks if check.verdict != "skip"]
    lines = [_line(compared, len(failed), several_graphs=several_graphs)] if compared else []
    reasons = lists_by_key((check.detail, check.graph) for check in skipped).items()
    parts = [[", ".join(dict.fromkeys(graphs)), reason] for reason, graphs in reasons]
    return lines + lines_of(failed) + [_joined("skip", checks[0].name, part) for part in parts]


def _line(checks: Sequence[Check], failed: int, *, several_graphs: bool) -> str:
    """`PASSED | left padding | 18 outputs | sigma 1.02 | worst row 1.38 | max abs 7.6e-07`."""
    outputs = [check for check in checks if check.output]
    if not outputs:
        details = dict.fromkeys(check.detail or check.graph for check in checks if check.verdict == "pass")
        parts = [f"{failed} of {len(checks)} differ"] if failed else ["; ".join(details)]
        return _joined("fail" if failed else "pass", checks[0].name, parts)
    parts = [
        f"{failed} of {len(outputs)} outputs differ" if failed else f"{len(outputs)} output{'s' * (len(outputs) > 1)}"
    ]
    graphs = {check.graph for check in outputs}
    parts = [*sorted(graphs), *parts] if several_graphs and len(graphs) == 1 else parts
    sigma, row, most = (max(getattr(check, name) for check in outputs) for name in ("sigma", "row_sigma", "max_abs"))
    parts += (
        [f"sigma {sigma_text(sigma)}", f"worst row {sigma_text(row)}", f"max abs {most:.1e}"] if sigma or most else []
    )
    parts += [outputs[0].detail] if len(outputs) == 1 and not failed and outputs[0].detail else []
    return _joined("fail" if failed else "pass", checks[0].name, parts)


def _joined(verdict: str, name: str, parts: Sequence[str]) -> str:
    return " | ".join(clean(part) for part in (WORDS[verdict], name, *parts) if part)
