"""`pdserve chat`: a conversation in the terminal, or responses to the lines of a pipe."""

import sys
from collections.abc import Mapping

from pdserve.services.cli.chat.conversation import Conversation, first_model
from pdserve.services.cli.chat.prompt import history_file, piped_lines, typed_lines
from pdserve.services.cli.chat.repl import COMMANDS, Repl
from pdserve.services.cli.chat.view import view_on
from pdserve.services.cli.http_client import ApiError, advice, client_of
from pdserve.services.options.settings import ChatSettings
from pdserve.services.options.sources import Settings


def run(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Chat until /exit or the end of input; return 1 if the server does not respond."""
    chat = settings.build(ChatSettings)
    try:
        client = client_of(chat)
        conversation = Conversation(client, first_model(client, chat.model), chat)
    except ApiError as error:
        print(f"pdserve chat: {error}{advice(error)}", file=sys.stderr)
        return 1
    typed = sys.stdin.isatty()
    if typed:
        print(
            f"{conversation.model} at {client.url}. Type /help for help.\n{conversation.sampling}"
        )
        lines = typed_lines(history_file() if chat.history else None, COMMANDS)
    else:
        lines = piped_lines()
    repl = Repl(conversation, lambda shows: view_on(sys.stdout, shows), sys.stdout)
    return repl.run(lines, typed=typed)
