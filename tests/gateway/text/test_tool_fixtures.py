"""Every fixture of the package canitoolcall through the parser of its family, whole and cut at
every character."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import canitoolcall
import pytest
from canitoolcall.checks import run_checks
from canitoolcall.fixtures import Family, Fixture, iter_fixtures, load_families
from canitoolcall.results import Observation, ParsedToolCall, ParseResult, Status
