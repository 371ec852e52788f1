package agentic

import (
	"time"

	"github.com/penstock-kv/penstock/dualpath"
	"github.com/penstock-kv/penstock/sim"
)

// fetcher is the common part of both kinds of groups: they fetch work from the planner at
// intervals. Each group has its own phase in the interval. If all groups fetched at the same time,
// the first group would always take all the work.
type fetcher struct {
	id      dualpath.GroupID
	fetches *sim.Timer
	phase   time.Duration
	// fill writes the engines' state into the report.
	fill  func(engines []dualpath.EngineReport)
	event dualpath.Fetch
	nodes []node
}

// init allocates the reports of the group's engines and of their nodes.
func (f *fetcher) init(c *Cluster, id dualpath.GroupID, engines int, nodes []node, fill func([]dualpath.EngineReport)) {
	f.id, f.nodes, f.fill = id, nodes, fill
	f.phase = time.Duration(c.phases.Int64N(int64(c.opts.FetchEvery)))
	f.event = dualpath.Fetch{Group: id, Engines: make([]dualpath.EngineReport, engines), Nodes: make([]dualpath.NodeReport, len(nodes))}
}

// wake schedules the group's next fetch, at the group's phase in the fetch interval. wake is called
// only after a change, for example the arrival of a request, because a fetch without a change would
// have no effect.
func (f *fetcher) wake(c *Cluster) {
	if f.fetches.Due() != sim.Never {
		return
	}
	every := c.opts.FetchEvery
	turns := (c.k.Now() - f.phase + every - 1) / every
	f.fetches.Set(f.phase + turns*every)
}

// fetch fetches work, with a report of the state of all engines and nodes of the group.
func (c *Cluster) fetch(f *fetcher) {
	f.event.At, f.event.Seen = c.k.Now(), c.seq
	f.fill(f.event.Engines)
	for i := range f.nodes {
		f.event.Nodes[i] = dualpath.NodeReport{Node: f.nodes[i].id, ReadQueue: int(f.nodes[i].snic.Queued())}
	}
	c.step(f.event)
}
