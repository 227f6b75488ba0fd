"""Prefixes of prefix tuning and prompt tuning: read, computed, stored in one small file."""
