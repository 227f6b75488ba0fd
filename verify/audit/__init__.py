"""Audits: what can be checked without running a graph, such as weights, signatures, checksums, decisions."""
