"""Chat templates: they turn a conversation of messages into the text of a model's prompt."""

from pdserve.text.templates.capabilities import Capabilities
from pdserve.text.templates.chat_template import ChatTemplate
from pdserve.text.templates.template_file import read_template
