package evict

import "errors"

const maxTouches = 3

// New returns an empty policy.
func New(kind Kind, tuning Tuning) (Policy, error) { return nil, errors.New("evict: not built yet") }
