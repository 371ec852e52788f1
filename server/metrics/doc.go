// Package metrics is the list of what a storage node counts. One struct, Node,
// has a field for each metric that code increments; what other parts count
// already (devices, arena, index, data plane) is read from them at scrape time
// by collectors registered beside it. docs/metrics.md documents every one, and a
// test holds the page and the registry together.
//
// Rules: penstock_<subsystem>_<what>_<unit>[_total]; base units; a counter of
// successes or hits stands beside the counter of attempts, and there is no ratio
// as a gauge, since ratios cannot be summed over nodes; hits are counted in
// tokens as well, the unit that engine users think in; labels are namespace,
// reason, volume and direction, never a key or a session.
package metrics
