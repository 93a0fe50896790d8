-- The highest token that is in use is found without reading all zones.
CREATE INDEX pointer_index_tokens ON pointer_index (token) WHERE token > 0;
