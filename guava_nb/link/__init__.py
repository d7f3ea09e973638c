"""One peer over several connections: messages that arrive once and in order, whatever happens to the connections."""
