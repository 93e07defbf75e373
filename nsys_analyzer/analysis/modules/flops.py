"""The FLOPs of modules, as they were counted while the program ran."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from nsys_analyzer.analysis.modules.module import Module, Modules
