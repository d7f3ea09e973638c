"""One peer over several connections: each message arrives once and in order. Knows no model, and not what messages mean."""
