"""What a report says about a limited time: how it was used, and what did not run."""

from __future__ import annotations

from llmconv.verify.results.report import Report
from llmconv.verify.scenarios.budget import Budget


def record_budget(report: Report, budget: Budget | None) -> None:
    """Adds how the time was used, a note if the mandatory scenarios took longer, and the number of rows left out.

    Args:
        report: of a finished verification.
        budget: its time; None without a limit.
    """
    if budget is None:
        return
    used, limit = budget.used, f"the budget of {budget.seconds:g} s"
    ran = [{"name": name, "seconds": seconds} for name, seconds in budget.ran]
    report.budget = {"seconds": budget.seconds, "used": round(used, 3), "ran": ran, "not_run": list(budget.left)}
    if (over := budget.core_seconds - budget.seconds) > 0:
        kind = "mandatory" if budget.chosen is None else "chosen"  # which run all at once
        end = f"{budget.core_seconds:.1f} s after the start, {over:.1f} s beyond {limit}"
        report.notes.append(f"the {kind} scenarios ended {end}")
    if count := len(budget.left):
        report.unseen.append(
            f"faults that only {count} scenario{'s' * (count > 1)} left out by {limit} show{'s' * (count == 1)}"
        )
