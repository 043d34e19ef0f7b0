"""Models: networks cut into features and classifier, from here or from elsewhere; transforms; scores."""
