"""Mirrors of object stores: folders whose large files are fetched in parts, where a reader asks for them."""
