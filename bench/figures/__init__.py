"""The figures, in the order in which they are measured. A new one is a file here and a line below."""

from bench.figures.admission import Admission
from bench.figures.effects import Effects
from bench.figures.events import Events
from bench.figures.fleet import Fleet
from bench.figures.footprint import Footprint
from bench.figures.health import Health
from bench.figures.jobs import JobsEndToEnd
from bench.figures.memory import Memory
from bench.figures.shared_effects import SharedEffects
from bench.figures.start import Start
from bench.figures.stop import Stop
from bench.measure import Figure

FIGURES: tuple[Figure, ...] = (
    Start(),
    Stop(),
    Admission(),
    Events(),
    Effects(),
    SharedEffects(),
    JobsEndToEnd(),
    Health(),
    Memory(),
    Footprint(),
    Fleet(),
)
