"""How trees grow: level by level on the host, in one native call, or on a device without the host.

A drafter has one :class:`~paceline.drafter.growth.sequence.TreeGrowth`, and each of its generations
is a :class:`~paceline.drafter.growth.sequence.GrownSequence` of this growth and of the passes of
its method.
"""
