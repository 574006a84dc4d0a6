"""The request bodies of chats and completions."""
