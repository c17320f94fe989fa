"""FlowSpec over small boards: pipelined tree speculative decoding of one large model."""
