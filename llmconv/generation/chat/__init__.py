"""Chats: messages, chat templates, and reuse of the cache between turns."""
