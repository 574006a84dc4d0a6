"""`pdserve up`: a complete system on one machine, and the supervision of its processes."""

from pdserve.cli.up.child import LOG_SUFFIX
from pdserve.cli.up.cores import Share, machine_cores, take
from pdserve.cli.up.folders import CONFIG_FILE, data_dir, run_dirs
from pdserve.cli.up.gateway_workers import run
