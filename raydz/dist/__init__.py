"""Process groups, mesh axes and timed collectives: layer 2. See README.md in this folder."""

from raydz.dist.clock import CommClock
from raydz.dist.collectives import Communicator, Handle
from raydz.dist.mesh import Mesh, MeshShape
from raydz.dist.setup import World, init_world, shutdown_world

__all__ = ["CommClock", "Communicator", "Handle", "Mesh", "MeshShape", "World", "init_world", "shutdown_world"]
