"""The endpoint picker for a Kubernetes Gateway."""

from pdserve.services.picker.main import run
from pdserve.services.picker.settings import PickerSettings
