package client

import (
	"context"
	"time"
)

// Lease keeps a matched prefix from being evicted.
type Lease struct {
	store *Store
	parts []leasePart
}

// leasePart is the lease on one node; only a flat namespace has several.
type leasePart struct {
	node *node
	id   uint64
}

var _ = time.Second
var _ context.Context
