package faultio

import (
	"fmt"

	"github.com/penstock-kv/penstock/io/blockio"
)

// Hook returns the rules as a blockio.ResultHook, for use below posixio and uring, and a Counter of
// the injected faults. Only Err, Short and Delay are possible below a device; a rule with another
// action is an error.
//
// A Short reports half of the bytes that the kernel moved, without rounding. An Err reports an
// error although the kernel moved bytes. The caller settles faults that surfaced as errors with
// Counter.Surfaced, and faults that the device repaired with Counter.Repaired.
func Hook(rules *Rules) (blockio.ResultHook, *Counter, error) {
	for _, r := range rules.list {
		if r.action != Err && r.action != Short && r.action != Delay {
			return nil, nil, fmt.Errorf("faultio: %v cannot be done below a device; Err, Short and Delay can", r)
		}
	}
	counter := newCounter()
	return newProgram(counter, rules).bend, counter, nil
}

func (p *program) bend(op blockio.Op, file string, offset int64, n int, err error) (int, error) {
	c := &call{kind: Read, files: []string{file}, offset: offset, bytes: int64(max(n, 1))}
	if op == blockio.Write {
		c.kind = Write
	}
	v := p.judge(c)
	v.wait()
	if v.rule == nil || err != nil {
		return n, err
	}
	if v.rule.action == Err {
		return 0, p.failure(v.rule, c, cause(v.rule.errno))
	}
	p.counter.add(v.rule.injection(c))
	return n / 2, nil
}
