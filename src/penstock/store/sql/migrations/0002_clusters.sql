-- Several databases that are one store: which of them this is, and how many there are.
ALTER TABLE instance ADD COLUMN cluster integer NOT NULL DEFAULT 0;
ALTER TABLE instance ADD COLUMN clusters integer NOT NULL DEFAULT 1;
