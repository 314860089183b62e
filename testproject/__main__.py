"""Django's management commands for this project: ``python -m testproject migrate``."""

from __future__ import annotations

import os
import sys

from django.core.management import execute_from_command_line

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
execute_from_command_line(["testproject", *sys.argv[1:]])
