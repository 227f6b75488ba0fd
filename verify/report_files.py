"""Placeholder until the reports are written."""


def write_report(report, folder): ...
