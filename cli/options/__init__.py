"""Options of the commands: their values from flags, environment and files, and their help."""

from pdserve.cli.options.aliases import translate
from pdserve.cli.options.options import ENV_PREFIX, OptionError, options_of
from pdserve.cli.options.parser import Positional, Section, parse
from pdserve.cli.options.settings import (
    DEFAULT_URL,
    MAX_TEMPERATURE,
    BenchSettings,
    CertsSettings,
    ChatSettings,
    ClientSettings,
    CompleteSettings,
    HealthSettings,
    QuantizeSettings,
    ReplaySettings,
    ReportSettings,
    TopSettings,
    UpSettings,
)
from pdserve.cli.options.sources import MASK, Settings, render, resolve
