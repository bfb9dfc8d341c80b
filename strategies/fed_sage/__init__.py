"""LocalSage+ and FedSage+: classifiers on graphs mended by generated neighbours."""
