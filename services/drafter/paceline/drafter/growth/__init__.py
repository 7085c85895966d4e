"""How trees grow: by levels of fixed width in one native call or on any device, or as chains.

A drafter has one :class:`~paceline.drafter.growth.sequence.TreeGrowth`, in whose ways the trees of
its generations grow: each is a :class:`~paceline.drafter.growth.sequence.GrownSequence`.
"""
