"""The broker: verbs over one store, group commit, waiting claims, background work.

==============  ==================================================================
``broker``      :class:`Broker`: every verb, in the order of a message's life
``requests``    many requests done as one change of the store
``runner``      the lock, the time, waiting claims, the sweeper thread
``durability``  group commit: one ``fsync`` for many changes
``router``      ``route_once``: the log into the queues, without Spark
``reader``      a store that is read beside its owner
==============  ==================================================================
"""

from penstock.broker.broker import Broker

__all__ = ["Broker"]
