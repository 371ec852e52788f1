package peer

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"
)

// lineProcess is a program that answers lines of JSON on its standard input with lines
// of JSON on a pipe.
type lineProcess struct {
	*Process
	in  io.WriteCloser
	out *os.File
	r   *bufio.Reader
	log bytes.Buffer
}

// startLines starts the command. attach passes the command the pipe for its answers.
func startLines(cmd *exec.Cmd, attach func(answers *os.File)) (_ *lineProcess, err error) {
	p := &lineProcess{}
	if p.in, err = cmd.StdinPipe(); err != nil {
		return nil, err
	}
	var childOut *os.File
	if p.out, childOut, err = os.Pipe(); err != nil {
		return nil, errors.Join(err, p.in.Close())
	}
	attach(childOut)
	cmd.Stderr = &p.log
	if cmd.Stdout == nil {
		cmd.Stdout = &p.log
	}
	cmd.WaitDelay = 10 * time.Second // a grandchild may still hold the log open
	p.Process, err = start(cmd)
	if err := errors.Join(err, childOut.Close()); err != nil {
		return nil, errors.Join(err, p.in.Close(), p.out.Close())
	}
	p.r = bufio.NewReader(p.out)
	return p, nil
}

// ask sends a request and reads the answer.
func (p *lineProcess) ask(ctx context.Context, request, into any) error {
	line, err := json.Marshal(request)
	if err != nil {
		return err
	}
	if _, err := p.in.Write(append(line, '\n')); err != nil && ctx.Err() == nil {
		return p.ended()
	}
	return p.answer(ctx, into)
}

// answer reads the next answer of the process. If ctx ends first, the process is killed.
func (p *lineProcess) answer(ctx context.Context, into any) error {
	defer context.AfterFunc(ctx, func() { _ = p.cmd.Process.Kill() })() // it may have ended already
	line, err := p.r.ReadBytes('\n')
	if err != nil {
		return errors.Join(ctx.Err(), p.ended())
	}
	return json.Unmarshal(line, into)
}

// ended waits until the process has ended and returns an error with its status and output.
func (p *lineProcess) ended() error {
	<-p.exited
	return fmt.Errorf("the worker ended (%v): %s", p.err, lastLines(p.log.String()))
}

// lastLines returns the end of a process's output.
func lastLines(text string) string {
	const most = 600
	text = strings.TrimSpace(text)
	return text[max(0, len(text)-most):]
}

// Close ends the process.
func (p *lineProcess) Close() error {
	_ = p.in.Close() // the process may have ended already
	return errors.Join(p.Process.Close(), p.out.Close())
}
