"""What the fleet is told of this worker's donors, and how it is read: events, sketches, publisher."""
