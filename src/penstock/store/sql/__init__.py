"""The contract on a SQL database: many processes on one PostgreSQL or CockroachDB.

After QuiCK: messages of one group of one queue are a *zone*; a queue of pointers, Q_C, tells which
zones have messages to claim; the pointer index p tells a publish, without touching Q_C, whether
its zone has a pointer. No process owns anything, and every verb is one transaction::

    schema.sql, queries.sql   the tables; every statement, by name
    location                  the URL, and its tunables; needs no driver
    connection                a connection: time limits, translated errors
    database                  connections of a process, repeated transactions, statements by name
    session                   queues and settings as this process knows them; all verbs are on it;
                              queues with limits
    zones                     pointers and their tokens, and their collection
    publish                   publish; rows of messages that come into queues
    settle                    ack, release, extend; leases that expire
    move                      move, redrive, dead letters
    routing                   the metadata log: read, assign, fill queues from it
    queues                    create, change, drain, delete, purge, trim
    claim                     claim; the watch for messages of other processes
    maintain                  sweep and retention; the invariants
    inspect, snapshot         browse and stats; one moment, to be read in bulk
    store                     open_store; the tables; one class with all verbs
"""
