"""One round in reading order: settings, sampling, send (reduce), train, aggregate (recover)."""
