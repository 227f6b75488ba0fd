"""Chats: messages, chat templates, and turns over one cache."""
