"""What the machines are: the Cluster, and the Profile of what was measured on it."""

from heterodyne.cluster.profile import BlockSample, DeviceProfile, LinkSample, Profile
from heterodyne.cluster.spec import Cluster, Device, Link

__all__ = ["BlockSample", "Cluster", "Device", "DeviceProfile", "Link", "LinkSample", "Profile"]
