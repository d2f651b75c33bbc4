{{/* The pod of a learner, the same in a Job and in a StatefulSet. Its agent is its index. */}}

{{/* Of whether the learners are a Job: the index of the pod, which is its agent. */}}
{{- define "dase.agentEnv" -}}
- name: DASE_AGENT
  valueFrom:
    fieldRef:
      fieldPath: metadata.{{ ternary "annotations['batch.kubernetes.io/job-completion-index']" "labels['apps.kubernetes.io/pod-index']" . }}
{{- end -}}

{{- define "dase.learnerTemplate" -}}
{{- $learners := .Values.learners -}}
{{- $about := dict "root" . "component" "learner" "values" $learners -}}
{{- $isJob := eq $learners.mode "job" -}}
metadata:
  {{- include "dase.podMetadata" $about | nindent 2 }}
spec:
  {{- include "dase.podSpec" $about | nindent 2 }}
  {{- if $isJob }}
  restartPolicy: Never
  {{- end }}
  {{- if .Values.tls.enabled }}
  initContainers:
    # All pods have one template, so the kubelet mounts the certificates of all agents; only this container sees
    # them. It hands on its own agent's, so that the learner can be no other agent, and follows renewals, which a
    # mount of a part of a volume (subPath) would not. It starts before the learner and ends after it.
    - name: certificate
      image: {{ include "dase.image" $about | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      restartPolicy: Always
      securityContext:
        {{- include "dase.containerSecurity" $about | nindent 8 }}
      resources:
        requests: {cpu: 1m, memory: 8Mi}
        limits: {memory: 32Mi}
      env:
        {{- include "dase.agentEnv" $isJob | nindent 8 }}
      command: [/bin/sh, -c]
      args:
        - |
          {{- .Files.Get "files/own_certificate.sh" | trim | nindent 10 }}
        - own-certificate
        - /agents/$(DASE_AGENT)
        - /own
        - "5"
      startupProbe:
        exec: {command: [test, -s, /own/tls.crt]}
        periodSeconds: 1
        failureThreshold: 60
      volumeMounts:
        - {name: agents, mountPath: /agents, readOnly: true}
        - {name: tls, mountPath: /own}
  {{- end }}
  containers:
    - {{- include "dase.container" $about | nindent 6 }}
      env:
        {{- include "dase.agentEnv" $isJob | nindent 8 }}
        {{- include "dase.extraEnv" $about | nindent 8 }}
      args:
        - node
        - --role=learner
        - --agent=$(DASE_AGENT)
        - --run-dir=/runs/{{ include "dase.runId" . }}
        - --resume
        {{- if $isJob }}
        - --unfinished-code=75
        {{- else }}
        - --stay
        {{- end }}
        {{- if gt (int $learners.gpu.count) 0 }}
        - --gpu=0
        {{- end }}
        {{- include "dase.clientArgs" $about | nindent 8 }}
      ports:
        - {name: metrics, containerPort: 9500}
      {{- include "dase.probes" $about | nindent 6 }}
      volumeMounts:
        {{- include "dase.commonMounts" $about | nindent 8 }}
        - {name: results, mountPath: /runs}
        {{- if .Values.tls.enabled }}
        - {name: tls, mountPath: /etc/dase/tls, readOnly: true}
        {{- end }}
  volumes:
    {{- include "dase.commonVolumes" $about | nindent 4 }}
    {{- if not .Values.results.perLearner }}
    - name: results
      persistentVolumeClaim: {claimName: {{ include "dase.resultsClaim" . | quote }}}
    {{- end }}
    {{- if .Values.tls.enabled }}
    - name: tls
      emptyDir: {medium: Memory, sizeLimit: 1Mi}
    - name: agents
      projected:
        defaultMode: 0440
        sources:
          {{- range $agent := until (int $learners.count) }}
          - secret:
              name: {{ $.Values.tls.secretPrefix }}-learner-{{ $agent }}
              items:
                - {key: ca.crt, path: {{ $agent }}/ca.crt}
                - {key: tls.crt, path: {{ $agent }}/tls.crt}
                - {key: tls.key, path: {{ $agent }}/tls.key}
          {{- end }}
    {{- end }}
{{- end -}}
