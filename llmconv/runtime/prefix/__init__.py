"""Prefixes of prefix tuning and prompt tuning: their files, and a runner that begins every prompt with one."""
