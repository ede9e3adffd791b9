"""Devices, layout, time and money of a training, before anything runs. Pure arithmetic, usable by itself.

`leaders(job, cluster)` are the best layouts; `choose_layout` picks one.
"""

from lightning_3d.tools.planner.catalogue import Catalogue as Catalogue
from lightning_3d.tools.planner.choose import choose_layout as choose_layout
from lightning_3d.tools.planner.hardware import Accelerator as Accelerator
from lightning_3d.tools.planner.hardware import Cluster as Cluster
from lightning_3d.tools.planner.job import Job as Job
from lightning_3d.tools.planner.known_models import named_model as named_model
from lightning_3d.tools.planner.priced_layout import Plan as Plan
from lightning_3d.tools.planner.profile import Profile as Profile
from lightning_3d.tools.planner.search import Pins as Pins
from lightning_3d.tools.planner.search import leaders as leaders
from lightning_3d.tools.planner.transformer import Transformer as Transformer
