"""The contract on a SQL database: many processes on one PostgreSQL or CockroachDB cluster.

After QuiCK: messages of one group of one queue are a *zone*; a queue of pointers, Q_C, tells which
zones have something to claim; the pointer index p tells an enqueue, without touching Q_C, whether
its zone has a pointer. No process owns anything, and every verb is one transaction::

    schema.sql                  the tables
    queries.sql, statements     every statement, by name
    database                    a connection: transactions that are repeated, errors translated
    schema                      is this our database, and does it have the present schema
    core                        queues and settings as this process knows them
    ring, zones                 tokens; pointers, what is known of them, their collection
    intake, claiming            publish; claim
    settling                    ack, release, extend; leases that expire
    upkeep, moving              sweep, retention, purge, redrive; from queue to queue
    routing                     the metadata log: read, assign, backfill, restore
    views, audit                browse, stats; the invariants
    store                       all of it as one Store
    pins, snapshot              a moment, to be read in bulk
"""
