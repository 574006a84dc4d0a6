"""Chat templates."""

from pdserve.text.templates.capabilities import Capabilities
from pdserve.text.templates.chat_template import ChatTemplate
