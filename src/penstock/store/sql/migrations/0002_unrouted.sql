-- Tailers count what no queue takes beside their cursors, not in the row that every publish locks.
ALTER TABLE log_cursors ADD COLUMN unrouted bigint NOT NULL DEFAULT 0;
