"""Options of the commands: how they are declared, their help, and their values from flags,
environment variables and files.
"""

from pdserve.cli.options.options import (
    ENV_PREFIX,
    FALSE,
    MASK,
    TRUE,
    CommandError,
    OptionError,
    Settings,
    options_of,
    render,
    resolve,
)
from pdserve.cli.options.parser import Positional, Section, after_separator, did_you_mean, parse
from pdserve.cli.options.settings import (
    DEFAULT_URL,
    MAX_TEMPERATURE,
    BenchSettings,
    CertsSettings,
    ChatSettings,
    ClientSettings,
    CompleteSettings,
    ConversationSettings,
    HealthSettings,
    QuantizeSettings,
    ReplaySettings,
    ReportSettings,
    RunSettings,
    TopSettings,
    UpSettings,
)
