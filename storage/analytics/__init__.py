"""What the traces of one or several runs tell, as Polars queries that stream: the store is all they read."""
